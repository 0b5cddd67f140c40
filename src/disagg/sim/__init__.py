"""Virtual time: the serving code on hardware that is only described."""

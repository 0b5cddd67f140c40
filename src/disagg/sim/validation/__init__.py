"""Published experiments as cases, and the fits that the hardware catalogue rests on."""

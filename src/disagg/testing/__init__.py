"""What tests of this project and of its users need: fakes, fake links, real processes."""

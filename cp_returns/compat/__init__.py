"""Other projects' function names and signatures over this library: `slime`."""

"""Reports: everything that is read off a program and its timeline."""

"""One file per table of the paper; the arguments of its `build` say what it is made from."""

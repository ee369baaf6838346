"""One file per figure of the paper; the arguments of its `build` say what it is made from."""

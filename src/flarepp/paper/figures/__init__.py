"""One file per figure of the paper; each has `build(records, out, *, shown, scale)`."""

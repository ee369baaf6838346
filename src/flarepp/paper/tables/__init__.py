"""One file per table of the paper; each has `build(records, out, *, shown, scale)`."""

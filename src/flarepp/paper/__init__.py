"""The paper layer: tables, figures and the claims ledger, each a pure function of records.

A file of `tables/` or `figures/` is one artefact with a function `build(records, out, *, shown, scale)`;
adding an artefact is adding a file. `cells` reduces records to one row per table cell, `quoted` holds what
the paper printed, `typeset` writes LaTeX, Markdown and CSV, `style` draws. Nothing here imports torch or any
module of flarepp but `record`.
"""

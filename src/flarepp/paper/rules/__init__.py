"""The rules that decide claims: every public function of a module here but `words` can be named as `rule` in claims.yaml.

A rule gets the cells a claim needs (a DataFrame with dataset, model, num_blocks, precision, dataset_label and
mean, the error in %; only cells with a value; one constant on axes the claim does not name) and the claim's
parameters; of suite table2 the rows of `scaling.efficiencies`, of suite figure5 those of `cost.cells`, a model without
latents at every M, of suite table6 those of `sequences.frame`, whose mean is an accuracy in %, of suite harness those of
`cost.harness`, of suite fields those of `location.frame`, of selection and half_depth those of `further`. It returns (what
was measured, whether the claim holds, None where nothing speaks against it but too little was compared), or None when too
few cells are there to say anything. It knows nothing of scales, data sources or missing runs.
"""

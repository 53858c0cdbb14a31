"""`fastaccum train`: a byte-level transformer on text, from files to a run folder."""

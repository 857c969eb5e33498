"""OASiS: online scheduling of distributed training jobs by resource prices (Bao et al., INFOCOM 2018)."""

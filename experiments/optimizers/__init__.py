"""K-FAC as an optimiser, beside SGD, NAdamW, AdamW and SOAP."""

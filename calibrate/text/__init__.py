"""Turn text into windows of token ids: documents, tokenisation, and which windows a calibration takes."""

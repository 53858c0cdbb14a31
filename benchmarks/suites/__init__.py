"""The suites: each `test_*.py` compares one thing of fastaccum with what people use today."""

"""Train steps compiled for a described H200, read kernel by kernel and put on a roofline."""

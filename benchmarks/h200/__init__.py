"""The train step compiled for an H200 that is not there, read kernel by kernel and put on a
roofline.
"""

"""Kineto traces of any training job: read, classified, split into parts."""

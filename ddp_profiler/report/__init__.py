"""Renders results for people. Computes nothing."""

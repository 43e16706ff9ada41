"""Thin glue to verl: what registers where, and nothing that a user without verl needs."""

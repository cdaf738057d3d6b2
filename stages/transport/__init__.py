"""Transports: how bytes move. Both ends of a wire stand in one file or name each other."""

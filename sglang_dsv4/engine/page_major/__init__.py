"""Serves page-major pools: page ids, refusals, the handshake, early sends."""

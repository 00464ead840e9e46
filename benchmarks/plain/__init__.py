"""Plain serving under retracts, beside stock, on live servers."""

"""Dense and routed feed-forward layers of many tokens, from GGUF weights: a token has the same bits in every batch."""

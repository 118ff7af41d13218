"""Expert layers (mixture of experts): a persistent grid against one CTA a tile, and when it pays."""

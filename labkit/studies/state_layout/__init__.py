"""Study 01: the memory layout of the gated delta rule's recurrent state."""

"""Study 06: two things that engines do today: decode that seldom writes its state, prefill in segments."""

"""The versions in Triton, for any GPU that Triton supports and for its interpreter."""

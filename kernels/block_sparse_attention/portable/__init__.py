"""The versions in Triton, for any GPU that it supports and for its interpreter."""

"""The endpoints: one file for each, a request's body in and its answer out."""

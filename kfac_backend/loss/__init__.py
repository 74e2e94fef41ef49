"""The loss, its Hessian, and the vectors that are propagated back."""

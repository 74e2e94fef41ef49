"""Table 2 of Eschenhagen et al. 2023: weight decay learned on CIFAR-10."""

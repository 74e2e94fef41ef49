"""Is learning the weight decay worth it, and by which evidence, optimiser and preset?"""

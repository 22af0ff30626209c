active = False


def is_in_breakable_cuda_graph():
    return active

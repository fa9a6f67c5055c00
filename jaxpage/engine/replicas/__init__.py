"""Several engines behind one front: in threads, in processes, or where Ray puts them."""

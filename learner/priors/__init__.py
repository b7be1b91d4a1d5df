"""What physics says of a metric before anything is learned; labels refine its few constants."""

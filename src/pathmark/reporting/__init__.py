"""What people look at: barcodes of paths."""

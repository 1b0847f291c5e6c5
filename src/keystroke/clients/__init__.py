"""What people and editors hold in their hands."""

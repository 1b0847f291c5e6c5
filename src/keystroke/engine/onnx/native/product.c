/* The products alone: the part that takes the compiler longest, compiled beside operators.c. */
#define PRODUCTS
#include "product.h"

/* Attention over a span alone, compiled beside operators.c. */
#define ATTENDING
#include "attention.h"

#pragma once
#include "activations.h"
INLINE int has_single(const Format *format) { return (void)format, 0; }
INLINE floats meet_single(const Format *format, Rows rows, size_t unit, int blocks, Slice s, floats total) {
    (void)format, (void)rows, (void)unit, (void)blocks, (void)s;
    return total;
}

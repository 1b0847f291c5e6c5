/* The vector operations that the operators are written in.
 *
 * vector_x86.h and vector_arm.h define the same names and give the same bits: integers are exact, and every lane of a
 * float vector is computed separately in the written order. LANES is the number of lanes of a vector, REGISTERS that
 * of registers. A sum of products starts at NOTHING; TAKES_ZERO: products subtract the zero of codes; FETCHED is the
 * cache level of prefetches; MOST_ROWS is the number of rows that are multiplied while weights are unpacked, which
 * have to stay in a cache meanwhile. `join_multiples` is for sums that fit 16 bits and only reads their low 16 bits.
 * Without the instructions of either header, compiling fails and the engine uses the portable operators.
 */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#include "vector_x86.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "vector_arm.h"
#else
#error "no vectors of bytes with products on this processor"
#endif

/* e to the power of each lane, within two units of the last place; 0 where that is below 2^-126. */
INLINE floats exponential(floats x) {
    x = greater(less(x, same(88.3f)), same(-87.33f - 1.0f));
    floats steps = whole(times(x, same(1.44269504f)));
    floats rest = times_plus(steps, same(-0.693359375f), x);
    rest = times_plus(steps, same(2.12194440e-4f), rest);
    floats power = same(1.9875691500e-4f);
    power = times_plus(power, rest, same(1.3981999507e-3f));
    power = times_plus(power, rest, same(8.3334519073e-3f));
    power = times_plus(power, rest, same(4.1665795894e-2f));
    power = times_plus(power, rest, same(1.6666665459e-1f));
    power = times_plus(power, rest, same(5.0000001201e-1f));
    power = add(times_plus(times(rest, rest), power, rest), same(1.0f));
    return times(power, as_floats(left(plus(nearest(steps), same_int(127)), 23)));
}

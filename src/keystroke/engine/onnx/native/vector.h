/* Numbers by the vector: the few operations of a processor that the operators are written in.
 *
 * Everything that differs between processors lies in the two halves below, and gives the same bits on
 * each: integers are exact, and of floats every lane is computed alone and in the order that is written.
 * A half says how many LANES a vector has and how many REGISTERS there are, and defines the same names as the
 * other. A sum of products starts at NOTHING; TAKES_ZERO: whether products take the zero of codes off; FETCHED says
 * how near the processor what comes next is brought, and MOST_ROWS how many rows meet weights while they are
 * unpacked: they are to stay in a cache while LANES rows of weights pass by. `join_multiples` is for sums that 16
 * bits hold and looks at their lower 16 bits only; each half keeps what they are multiplied by as it likes best.
 * Without either half's instructions, compiling fails and the caller does without.
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

/* Threads that divide the work of an operator: the runtime's, or a pool of our own.
 *
 * The pool gives every thread its own contiguous share of the tasks, so that each reads one stream of weights; a thread
 * that is done takes tasks of the others. The caller takes part and never waits for a thread that has not begun. Threads
 * spin briefly between two pieces of work, and then sleep.
 */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void (*Work)(void *data, size_t task);

typedef struct Threads {
    void (*each)(struct Threads *self, Work work, size_t count, void *data);
} Threads;

/* Calls `work(data, i)` for every i below `count`. */
static inline void for_tasks(Threads *threads, Work work, size_t count, void *data) { threads->each(threads, work, count, data); }

enum { FEW_ROWS = 8 };

/* The same for rows, which are not worth dividing if they are few. */
static inline void for_each_row(Threads *threads, Work work, size_t rows, void *data) {
    if (rows >= FEW_ROWS) for_tasks(threads, work, rows, data);
    else for (size_t r = 0; r < rows; r++) work(data, r);
}

enum { MOST_THREADS = 64, SPIN_NS = 50000 };
/* The state of a pool: the number of the round, whether it is over, and how many threads work on it. */
enum { INSIDE = 0x7fff, OVER = 0x8000, ROUND = 0x10000 };

typedef struct {
    _Alignas(64) atomic_size_t next;
    size_t end;
} Share;

typedef struct {
    Threads base;
    Share shares[MOST_THREADS];
    size_t count;
    Work work;
    void *data;
    pthread_t threads[MOST_THREADS];
    size_t started; /* threads beside the caller */
    int64_t spin_ns; /* how long a thread without work spins before it sleeps */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Alignas(64) atomic_uint_fast64_t state;
    _Alignas(64) atomic_int asleep, closing;
} Pool;

typedef struct {
    Pool *pool;
    size_t index;
} Member;

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

static inline int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether to spin on: `turns` counts the calls, `until` is set by the first that looks at the clock. */
static inline int spins_on(unsigned *turns, int64_t *until, int64_t spin_ns) {
    pause_briefly();
    if (++*turns % 64) return 1;
    int64_t now = nanoseconds();
    if (!*until) *until = now + spin_ns;
    return now < *until;
}

static void take_tasks(Pool *pool, size_t own) {
    for (size_t i = 0; i < pool->count; i++) {
        Share *share = pool->shares + (own + i) % pool->count;
        for (size_t task; (task = atomic_fetch_add_explicit(&share->next, 1, memory_order_relaxed)) < share->end;)
            pool->work(pool->data, task);
    }
}

static void *serve(void *data) {
    Member member = *(Member *)data;
    Pool *pool = member.pool;
    free(data);
    uint_fast64_t round = 0;
    for (unsigned turns = 0;;) {
        int64_t until = 0;
        uint_fast64_t state;
        while ((state = atomic_load_explicit(&pool->state, memory_order_acquire)) / ROUND == round && !atomic_load(&pool->closing)) {
            if (spins_on(&turns, &until, pool->spin_ns)) continue;
            pthread_mutex_lock(&pool->lock);
            atomic_fetch_add(&pool->asleep, 1);
            while (atomic_load(&pool->state) / ROUND == round && !atomic_load(&pool->closing)) pthread_cond_wait(&pool->wake, &pool->lock);
            atomic_fetch_sub(&pool->asleep, 1);
            pthread_mutex_unlock(&pool->lock);
        }
        if (atomic_load(&pool->closing)) return NULL;
        if (state & OVER) round = state / ROUND; /* the others have done it */
        else if (atomic_compare_exchange_weak_explicit(&pool->state, &state, state + 1, memory_order_acq_rel, memory_order_relaxed)) {
            round = state / ROUND;
            take_tasks(pool, member.index);
            atomic_fetch_sub_explicit(&pool->state, 1, memory_order_release);
        }
    }
}

static void wake_all(Pool *pool) {
    if (!atomic_load(&pool->asleep)) return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

static void divide(Threads *threads, Work work, size_t count, void *data) {
    Pool *pool = (Pool *)threads;
    if (pool->count == 1 || count < 2) {
        for (size_t i = 0; i < count; i++) work(data, i);
        return;
    }
    pool->work = work, pool->data = data;
    for (size_t i = 0; i < pool->count; i++) {
        atomic_store_explicit(&pool->shares[i].next, count * i / pool->count, memory_order_relaxed);
        pool->shares[i].end = count * (i + 1) / pool->count;
    }
    atomic_store(&pool->state, (atomic_load(&pool->state) / ROUND + 1) * ROUND);
    wake_all(pool);
    take_tasks(pool, 0);
    atomic_fetch_or_explicit(&pool->state, OVER, memory_order_acq_rel);
    unsigned turns = 0;
    for (int64_t until = 0; atomic_load_explicit(&pool->state, memory_order_acquire) & INSIDE;) {
        if (!spins_on(&turns, &until, pool->spin_ns)) sched_yield();
    }
}

static void close_pool(Pool *pool) {
    atomic_store(&pool->closing, 1);
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (size_t i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->wake), pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* A pool of `count` threads, the caller included, or as many as could be started; NULL without memory. */
static Pool *open_pool(size_t count, int64_t spin_ns) {
    Pool *pool = aligned_alloc(64, (sizeof(Pool) + 63) / 64 * 64);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->base.each = divide, pool->spin_ns = spin_ns;
    pthread_mutex_init(&pool->lock, NULL), pthread_cond_init(&pool->wake, NULL);
    pool->count = 1;
    while (pool->count < count && pool->count < MOST_THREADS) {
        Member *member = malloc(sizeof *member);
        if (!member) break;
        *member = (Member){pool, pool->count};
        if (pthread_create(pool->threads + pool->started, NULL, serve, member)) {
            free(member);
            break;
        }
        pool->started++, pool->count++;
    }
    return pool;
}

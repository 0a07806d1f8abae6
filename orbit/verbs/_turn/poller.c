/* poller.c: a thread that polls one completion queue into a ring, over whichever turn_poll it is linked with.
 *
 * One producer (the thread) and one consumer (turn_poller_drain), which share nothing but two counters. Each of them
 * publishes its own counter and then looks at the other's, both sequentially consistent: so when the consumer finds the
 * ring empty and goes to sleep, the producer of the next completion sees that it was empty, and wakes it.
 */
#define _GNU_SOURCE
#include "turn.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ENTRIES_MAX = 1 << 22, IDLE_POLLS_PER_CLOCK = 16, CACHE_LINE = 64 };

struct poller {
    pthread_t thread;
    uint64_t cq;
    int event_fd;
    uint32_t mask, idle_us, nap_us;
    bool joined;
    struct turn_wc *ring;
    _Alignas(CACHE_LINE) atomic_uint_fast64_t polled; /* written by the thread alone */
    atomic_int failure;
    _Alignas(CACHE_LINE) atomic_uint_fast64_t drained; /* written by turn_poller_drain alone */
    atomic_bool stop, announced;
};

static struct poller *poller_at(uint64_t address)
{
    return (struct poller *)(uintptr_t)address;
}

static uint64_t now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

static void announce(struct poller *poller)
{
    uint64_t one = 1;

    /* In this order: who is woken by the write finds that there is something to read. */
    atomic_store(&poller->announced, true);
    while (write(poller->event_fd, &one, sizeof one) < 0 && errno == EINTR)
        continue;
}

/* Make event_fd unreadable again. It comes before the ring is looked at, so that what it announced is found. */
static void clear_announcement(struct poller *poller)
{
    uint64_t wakes;

    if (!atomic_exchange(&poller->announced, false))
        return; /* spares the system call */
    if (read(poller->event_fd, &wakes, sizeof wakes) < 0)
        atomic_store(&poller->announced, true); /* the write is about to come: read it next time */
}

/* One poll, straight into the free part of the ring that lies in one piece. How many, or -errno. */
static int poll_once(struct poller *poller)
{
    uint64_t at = atomic_load_explicit(&poller->polled, memory_order_relaxed);
    uint64_t size = (uint64_t)poller->mask + 1;
    uint64_t room = size - (at - atomic_load(&poller->drained));
    uint64_t piece = size - (at & poller->mask);
    int got = turn_poll(poller->cq, &poller->ring[at & poller->mask], (uint32_t)(room < piece ? room : piece));

    if (got <= 0)
        return got;
    atomic_store(&poller->polled, at + (uint64_t)got);
    if (atomic_load(&poller->drained) == at)
        announce(poller);
    return got;
}

/* Between two polls that found nothing: let others run, and sleep when it lasts. */
static void rest(const struct poller *poller, uint32_t *idle_polls, uint64_t *idle_since_us)
{
    uint32_t us = poller->nap_us;
    const struct timespec nap = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};

    if (us && !((*idle_polls)++ % IDLE_POLLS_PER_CLOCK)) {
        uint64_t now = now_us();

        if (!*idle_since_us)
            *idle_since_us = now;
        if (now - *idle_since_us >= poller->idle_us) {
            nanosleep(&nap, NULL);
            *idle_polls = 0; /* asleep before every poll from here on */
            return;
        }
    }
    sched_yield();
}

static void *run(void *argument)
{
    struct poller *poller = argument;
    uint64_t idle_since_us = 0;
    uint32_t idle_polls = 0;

    while (!atomic_load_explicit(&poller->stop, memory_order_acquire)) {
        int got = poll_once(poller);

        if (got < 0) {
            atomic_store(&poller->failure, got);
            announce(poller);
            break;
        }
        if (got > 0) {
            idle_since_us = 0;
            idle_polls = 0;
        } else {
            rest(poller, &idle_polls, &idle_since_us);
        }
    }
    return NULL;
}

static uint32_t ring_size(uint32_t entries)
{
    uint32_t size = 1;

    while (size < entries)
        size *= 2;
    return size;
}

static int start_thread(struct poller *poller)
{
    sigset_t all, before;
    int rc;

    /* Signals are for the interpreter's own threads. */
    sigfillset(&all);
    rc = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc)
        return rc;
    rc = pthread_create(&poller->thread, NULL, run, poller);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!rc)
        pthread_setname_np(poller->thread, "orbit-poller");
    return rc;
}

uint64_t turn_poller_start(uint64_t cq, int event_fd, uint32_t entries, uint32_t idle_us, uint32_t nap_us, int *error)
{
    struct poller *poller;

    *error = !cq || event_fd < 0 ? -EBADF : !entries || entries > ENTRIES_MAX ? -EINVAL : 0;
    if (*error)
        return 0;
    poller = aligned_alloc(CACHE_LINE, sizeof *poller);
    if (poller) {
        memset(poller, 0, sizeof *poller);
        poller->ring = calloc(ring_size(entries), sizeof *poller->ring);
    }
    if (!poller || !poller->ring) {
        free(poller);
        *error = -ENOMEM;
        return 0;
    }
    poller->cq = cq;
    poller->event_fd = event_fd;
    poller->mask = ring_size(entries) - 1;
    poller->idle_us = idle_us;
    poller->nap_us = nap_us;
    *error = -start_thread(poller);
    if (*error) {
        free(poller->ring);
        free(poller);
        return 0;
    }
    return (uint64_t)(uintptr_t)poller;
}

int turn_poller_bind(uint64_t address, const uint32_t *cpus, uint32_t count)
{
    struct poller *poller = poller_at(address);
    cpu_set_t set;

    if (!poller || poller->joined)
        return -EBADF;
    CPU_ZERO(&set);
    for (uint32_t i = 0; i < count; i++) {
        if (cpus[i] >= CPU_SETSIZE)
            return -EINVAL;
        CPU_SET(cpus[i], &set);
    }
    return -pthread_setaffinity_np(poller->thread, sizeof set, &set);
}

int turn_poller_drain(uint64_t address, struct turn_wc *out, uint32_t max)
{
    struct poller *poller = poller_at(address);
    uint32_t count = 0;

    if (!poller)
        return -EBADF;
    clear_announcement(poller);
    while (count < max) {
        /* The failure is looked at before the counter: completions that were polled before it come first. */
        int failure = atomic_load(&poller->failure);
        uint64_t at = atomic_load_explicit(&poller->drained, memory_order_relaxed);
        uint64_t ready = atomic_load(&poller->polled) - at;
        uint64_t piece = (uint64_t)poller->mask + 1 - (at & poller->mask);

        if (!ready)
            return count ? (int)count : failure;
        if (ready > piece)
            ready = piece;
        if (ready > max - count)
            ready = max - count;
        memcpy(&out[count], &poller->ring[at & poller->mask], ready * sizeof *out);
        count += (uint32_t)ready;
        atomic_store(&poller->drained, at + ready);
    }
    return (int)count;
}

void turn_poller_stop(uint64_t address)
{
    struct poller *poller = poller_at(address);

    if (!poller || poller->joined)
        return;
    atomic_store_explicit(&poller->stop, true, memory_order_release);
    pthread_join(poller->thread, NULL);
    poller->joined = true;
}

void turn_poller_free(uint64_t address)
{
    struct poller *poller = poller_at(address);

    if (!poller)
        return;
    turn_poller_stop(address);
    free(poller->ring);
    free(poller);
}

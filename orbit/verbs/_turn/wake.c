/* wake.c: the calls that do several steps in one crossing, over whichever library's steps they are linked with.
 *
 * What is remembered between calls is whether the queue is armed, by the caller. Only an event that was read tells that
 * it is not armed any more: one that is still on its way wakes the caller as an armed queue would.
 */
#define _GNU_SOURCE
#include "turn.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

enum { SPINS_PER_CLOCK = 16, EVENTS_SHIFT = 1 };

struct wake {
    uint64_t channel, cq;
    struct turn_wc *out;
    uint32_t max, found;
    uint32_t events;
    bool armed;
};

static uint64_t now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

/* Each of these steps returns 0 or -errno. */

static int poll_more(struct wake *wake)
{
    int got = turn_poll(wake->cq, wake->out + wake->found, wake->max - wake->found);

    if (got < 0)
        return got;
    wake->found += (uint32_t)got;
    return 0;
}

static int drain(struct wake *wake)
{
    int got = turn_drain_events(wake->channel, wake->cq);

    if (got < 0)
        return got;
    wake->events += (uint32_t)got;
    if (got)
        wake->armed = false;
    return 0;
}

/* A completion that came before the arm raises no event, so poll after it. */
static int arm_and_poll(struct wake *wake)
{
    int rc = turn_arm(wake->cq);

    if (rc)
        return rc;
    wake->armed = true;
    return poll_more(wake);
}

/* Up to the sleep. Whatever fails, the queue is polled: its completions come before the error. */
static int look(struct wake *wake)
{
    int failed = drain(wake), rc = poll_more(wake);

    if (!failed)
        failed = rc;
    if (!failed && !wake->armed && wake->found < wake->max)
        failed = arm_and_poll(wake);
    return failed;
}

static int result(const struct wake *wake, int failed, uint32_t *state)
{
    *state = (wake->armed ? TURN_ARMED : 0) | wake->events << EVENTS_SHIFT;
    return wake->found ? (int)wake->found : failed;
}

int turn_wake(uint64_t channel, uint64_t cq, struct turn_wc *out, uint32_t max, uint32_t *state)
{
    struct wake wake = {.channel = channel, .cq = cq, .out = out, .max = max, .armed = *state & TURN_ARMED};
    int failed = look(&wake);

    return result(&wake, failed, state);
}

static int spin(struct wake *wake, uint32_t spin_us)
{
    uint64_t end = spin_us ? now_us() + spin_us : 0;

    do {
        for (int i = 0; i < (spin_us ? SPINS_PER_CLOCK : 1); i++) {
            int rc = poll_more(wake);

            if (rc || wake->found)
                return rc;
        }
    } while (spin_us && now_us() < end);
    return 0;
}

/* The queue was polled since it was armed, if it is. */
static int sleep_until_found(struct wake *wake, uint32_t nap_us)
{
    struct pollfd ready = {.fd = turn_channel_fd(wake->channel), .events = POLLIN};
    uint64_t end = now_us() + nap_us, now;

    if (ready.fd < 0)
        return ready.fd;
    for (;;) {
        int rc = wake->armed ? 0 : arm_and_poll(wake);
        struct timespec left;

        if (rc || wake->found)
            return rc;
        now = now_us();
        if (now >= end)
            return 0;
        turn_before_sleep(wake->channel);
        left.tv_sec = (time_t)((end - now) / 1000000u);
        left.tv_nsec = (long)((end - now) % 1000000u) * 1000;
        rc = ppoll(&ready, 1, &left, NULL);
        if (rc < 0 && errno != EINTR)
            return -errno;
        rc = rc > 0 ? drain(wake) : 0;
        if (!rc)
            rc = poll_more(wake);
        if (rc || wake->found)
            return rc;
    }
}

int turn_wait(uint64_t cq, uint64_t channel, uint32_t spin_us, uint32_t nap_us, struct turn_wc *out, uint32_t max,
              uint32_t *state)
{
    struct wake wake = {.channel = channel, .cq = cq, .out = out, .max = max, .armed = state && *state & TURN_ARMED};
    int failed = spin(&wake, spin_us);

    if (!failed && !wake.found && channel)
        failed = sleep_until_found(&wake, nap_us);
    if (!state)
        return wake.found ? (int)wake.found : failed;
    if (wake.found && channel)
        failed = look(&wake);
    return result(&wake, failed, state);
}

int turn_post(uint64_t qp, const struct turn_recv *recvs, uint32_t recv_count, const struct turn_wr *wrs,
              uint32_t count, uint32_t *accepted, uint64_t channel, uint64_t cq, struct turn_wc *out, uint32_t max,
              uint32_t *state)
{
    int rc = recv_count ? turn_post_recv(qp, recvs, recv_count, &accepted[TURN_RECEIVES]) : 0, got;

    if (!recv_count)
        accepted[TURN_RECEIVES] = 0;
    accepted[TURN_SENDS] = 0;
    if (!rc && count)
        rc = turn_post_send(qp, wrs, count, &accepted[TURN_SENDS]);
    if (rc || !max)
        return rc;
    got = turn_wake(channel, cq, out, max, state);
    return got > 0 ? got : 0; /* what keeps it from polling meets the next call, too */
}

/* wake_steps.c: wake.c over steps that a script answers, to show what becomes of completions when a step fails.
 *
 * A step of the script is a letter and a number: d(rain), p(oll) and a(rm), with what it returns. The program checks that
 * the calls come in the order of the script.
 */
#define _GNU_SOURCE
#include "turn.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct step {
    char name;
    int result;
};

static const struct step *script;
static int readable[2];

static int play(char name)
{
    if (script->name != name) {
        fprintf(stderr, "called %c, the script has %c\n", name, script->name ? script->name : '.');
        exit(1);
    }
    return script++->result;
}

int turn_poll(uint64_t cq, struct turn_wc *out, uint32_t max)
{
    int got = play('p');

    (void)cq;
    for (int i = 0; i < got; i++) {
        if ((uint32_t)i == max) {
            fprintf(stderr, "polled %d of %u\n", got, max);
            exit(1);
        }
        memset(&out[i], got, sizeof *out);
    }
    return got;
}

int turn_arm(uint64_t cq)
{
    (void)cq;
    return play('a');
}

int turn_drain_events(uint64_t channel, uint64_t cq)
{
    (void)channel;
    (void)cq;
    return play('d');
}

int turn_channel_fd(uint64_t channel)
{
    (void)channel;
    return readable[0];
}

void turn_before_sleep(uint64_t channel)
{
    (void)channel;
    play('s');
}

int turn_post_recv(uint64_t qp, const struct turn_recv *recvs, uint32_t count, uint32_t *accepted)
{
    (void)qp;
    (void)recvs;
    *accepted = count;
    return play('r');
}

int turn_post_send(uint64_t qp, const struct turn_wr *wrs, uint32_t count, uint32_t *accepted)
{
    (void)qp;
    (void)wrs;
    *accepted = count;
    return play('w');
}

static void expect(const char *what, int got, int wanted, uint32_t state, uint32_t wanted_state)
{
    if (got != wanted || state != wanted_state || script->name) {
        fprintf(stderr, "%s: %d and state %u instead of %d and %u, before %c\n", what, got, state, wanted, wanted_state,
                script->name ? script->name : '.');
        exit(1);
    }
}

/* Exactly `max` records of memory, so that a sanitizer sees one that is too many. */
static void wake(const char *what, const struct step *steps, uint32_t max, uint32_t state, int wanted, uint32_t after)
{
    struct turn_wc *out = malloc(max * sizeof *out);
    int got;

    script = steps;
    got = turn_wake(1, 2, out, max, &state);
    expect(what, got, wanted, state, after);
    free(out);
}

static void wait_for(const char *what, const struct step *steps, uint32_t state, int wanted, uint32_t after)
{
    struct turn_wc out[4];
    int got;

    script = steps;
    got = turn_wait(2, 1, 0, 2000, out, 4, &state);
    expect(what, got, wanted, state, after);
}

static void post(const char *what, const struct step *steps, uint32_t max, int wanted, uint32_t accepted, uint32_t after)
{
    struct turn_wc out[4];
    struct turn_recv recvs[2] = {{0}};
    struct turn_wr wrs[3] = {{0}};
    uint32_t state = TURN_ARMED, both[2] = {7, 7};
    int got;

    script = steps;
    got = turn_post(3, recvs, 2, wrs, 3, both, 1, 2, out, max, &state);
    expect(what, got, wanted, state, after);
    expect(what, (int)both[TURN_SENDS], (int)accepted, both[TURN_RECEIVES], 2);
}

#define STEPS(...) ((const struct step[]){__VA_ARGS__, {0, 0}})
#define EVENTS(count, armed) ((count) << 1 | (armed))

int main(void)
{
    if (pipe(readable))
        return 1;
    wake("nothing", STEPS({'d', 0}, {'p', 0}, {'a', 0}, {'p', 0}), 4, 0, 0, EVENTS(0, 1));
    wake("armed before", STEPS({'d', 0}, {'p', 3}), 4, TURN_ARMED, 3, EVENTS(0, 1));
    wake("an event", STEPS({'d', 2}, {'p', 1}, {'a', 0}, {'p', 0}), 4, TURN_ARMED, 1, EVENTS(2, 1));
    wake("between poll and arm", STEPS({'d', 1}, {'p', 1}, {'a', 0}, {'p', 2}), 4, TURN_ARMED, 3, EVENTS(1, 1));
    wake("full", STEPS({'d', 1}, {'p', 4}), 4, TURN_ARMED, 4, EVENTS(1, 0));
    wake("full by the second poll", STEPS({'d', 1}, {'p', 1}, {'a', 0}, {'p', 3}), 4, 0, 4, EVENTS(1, 1));
    wake("no room", STEPS({'d', 1}, {'p', 0}), 0, TURN_ARMED, 0, EVENTS(1, 0));
    wake("arm fails", STEPS({'d', 1}, {'p', 2}, {'a', -EIO}), 4, TURN_ARMED, 2, EVENTS(1, 0));
    wake("and again", STEPS({'d', 0}, {'p', 0}, {'a', -EIO}), 4, 0, -EIO, EVENTS(0, 0));
    wake("no second poll", STEPS({'d', 1}, {'p', 2}, {'a', 0}, {'p', -EIO}), 4, 0, 2, EVENTS(1, 1));
    wake("no poll", STEPS({'d', 1}, {'p', -EIO}), 4, TURN_ARMED, -EIO, EVENTS(1, 0));
    wake("no channel", STEPS({'d', -EBADF}, {'p', 3}), 4, 0, 3, EVENTS(0, 0));
    wake("no channel, and nothing", STEPS({'d', -EBADF}, {'p', 0}), 4, 0, -EBADF, EVENTS(0, 0));

    wait_for("at once", STEPS({'p', 1}, {'d', 0}, {'p', 2}), TURN_ARMED, 3, EVENTS(0, 1));
    wait_for("in vain", STEPS({'p', 0}, {'s', 0}, {'p', 0}), TURN_ARMED, 0, EVENTS(0, 1));
    wait_for("in vain, not armed", STEPS({'p', 0}, {'a', 0}, {'p', 0}, {'s', 0}, {'p', 0}), 0, 0, EVENTS(0, 1));
    wait_for("arm fails", STEPS({'p', 0}, {'a', -EIO}), 0, -EIO, EVENTS(0, 0));
    if (write(readable[1], "x", 1) != 1)
        return 1;
    wait_for("asleep", STEPS({'p', 0}, {'s', 0}, {'d', 1}, {'p', 1}, {'d', 0}, {'p', 0}, {'a', 0}, {'p', 1}), TURN_ARMED, 2,
             EVENTS(1, 1));
    wait_for("an event without a completion", STEPS({'p', 0}, {'s', 0}, {'d', 1}, {'p', 0}, {'a', 0}, {'p', 4}, {'d', 0}, {'p', 0}),
             TURN_ARMED, 4, EVENTS(1, 1));

    post("and look", STEPS({'r', 0}, {'w', 0}, {'d', 0}, {'p', 1}), 4, 1, 3, EVENTS(0, 1));
    post("only", STEPS({'r', 0}, {'w', 0}), 0, 0, 3, EVENTS(0, 1));
    post("no receives", STEPS({'r', -ENOMEM}), 4, -ENOMEM, 0, EVENTS(0, 1));
    post("no sends", STEPS({'r', 0}, {'w', -ENOMEM}), 4, -ENOMEM, 3, EVENTS(0, 1));
    post("no look", STEPS({'r', 0}, {'w', 0}, {'d', 0}, {'p', -EIO}), 4, 0, 3, EVENTS(0, 1));
    return 0;
}

/* scripted_rules.c: what a test tells the fake's devices: their state, the rules for work requests, what is held back
 * and when it is let go; and what they tell a test: their counters, and what they still reach.
 */
#include "scripted_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int locked_return(int value)
{
    fake_unlock();
    return value;
}

int fake_device_set_gid(uint64_t address, uint32_t index, const uint8_t *gid)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device || index >= GID_ENTRIES)
        return -EINVAL;
    fake_lock();
    memcpy(device->gids[index], gid, sizeof device->gids[index]);
    fake_emit_port(device, EVENT_GID_CHANGE);
    return locked_return(0);
}

int fake_device_set_port(uint64_t address, uint32_t active)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    fake_lock();
    if (device->active != (active != 0)) {
        device->active = active;
        fake_emit_port(device, active ? EVENT_PORT_ACTIVE : EVENT_PORT_ERR);
        if (active && is_rxe(&device->object))
            fake_emit_port(device, EVENT_PORT_ACTIVE); /* rxe says it twice */
    }
    return locked_return(0);
}

int fake_device_set_lid(uint64_t address, uint32_t lid)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    fake_lock();
    if (device->lid && device->lid != lid)
        fake_emit_port(device, EVENT_LID_CHANGE);
    device->lid = lid;
    return locked_return(0);
}

int fake_device_set_quiet(uint64_t address, uint32_t quiet)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    device->quiet = quiet;
    return 0;
}

int fake_device_set_pkeys(uint64_t address, uint32_t count)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    device->pkey_count = count;
    return 0;
}

int fake_device_set_windows(uint64_t address, uint32_t supported)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    device->windows = supported;
    return 0;
}

int fake_device_set_limit_at_arm(uint64_t address, uint32_t at_arm)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    device->limit_at_arm = at_arm;
    return 0;
}

int fake_device_set_rtr_delay(uint64_t address, uint32_t microseconds)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    device->rtr_delay_us = microseconds;
    return 0;
}

int fake_device_set_message_max(uint64_t address, uint64_t bytes)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    device->message_max = bytes;
    return 0;
}

int fake_device_add_rule(uint64_t address, const struct fake_rule *rule)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    if (device->rule_count == RULES_MAX)
        return -ENOSPC;
    fake_lock();
    device->rules[device->rule_count++] = (struct rule){.is = *rule};
    return locked_return(0);
}

int fake_device_clear_rules(uint64_t address)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    fake_lock();
    device->rule_count = 0;
    return locked_return(0);
}

struct fake_rule *fake_next_match(struct device *device, uint32_t opcode, uint32_t action)
{
    struct fake_rule *match = NULL;

    for (uint32_t i = 0; i < device->rule_count; i++) {
        struct rule *rule = &device->rules[i];

        if (rule->is.action != action || (rule->is.opcode != opcode && rule->is.opcode != FAKE_ANY))
            continue;
        if (rule->seen < rule->is.skip) {
            rule->seen++;
        } else if (!match && rule->is.count) {
            match = &rule->is;
            if (rule->is.count != UINT32_MAX)
                rule->is.count--;
        }
    }
    return match;
}

void fake_match_rules(struct device *device, uint32_t opcode, struct wqe *wqe)
{
    struct fake_rule *failing = fake_next_match(device, opcode, FAKE_FAIL);

    wqe->hold = fake_next_match(device, opcode, FAKE_HOLD) != NULL;
    wqe->lose = fake_next_match(device, opcode, FAKE_LOSE) != NULL;
    wqe->duplicate = fake_next_match(device, opcode, FAKE_DUPLICATE) != NULL;
    wqe->delay = fake_next_match(device, opcode, FAKE_DELAY) != NULL;
    wqe->fail = failing != NULL;
    if (failing) {
        wqe->status = failing->status;
        wqe->vendor_err = failing->vendor_err_or_known;
    }
}

static int release(struct device *device)
{
    int released = 0;

    for (struct object *o = device->object.fabric->objects; o; o = o->next)
        if (o->kind == KIND_QP && o->device == device)
            released += fake_release_payloads((struct qp *)o);
    for (struct object *o = device->object.fabric->objects; o; o = o->next) {
        struct cq *cq = (struct cq *)o;
        struct entries held;

        if (o->kind != KIND_CQ || o->device != device)
            continue;
        held = cq->held;
        cq->held = (struct entries){.count = 0};
        for (uint32_t i = 0; i < held.count; i++)
            fake_enqueue(cq, &held.items[i]);
        released += (int)held.count;
        free(held.items);
    }
    return released;
}

int fake_device_release(uint64_t address)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    fake_lock();
    return locked_return(release(device));
}

int fake_device_release_at(uint64_t address, uint32_t step, uint32_t skip)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    fake_lock();
    device->release_step = step;
    device->release_skip = skip;
    return locked_return(0);
}

void fake_step(struct device *device, enum fake_step step)
{
    if (device->release_step != (uint32_t)step)
        return;
    if (device->release_skip) {
        device->release_skip--;
        return;
    }
    device->release_step = 0;
    release(device);
}

int fake_device_counters(uint64_t address, struct fake_counters *out)
{
    struct device *device = live(address, KIND_DEVICE);

    if (!device)
        return -EBADF;
    fake_lock();
    *out = device->counters;
    return locked_return(0);
}

static bool overlap(uint64_t start, uint64_t length, uint64_t other, uint64_t size)
{
    return length && size && start < other + size && other < start + length;
}

/* A completion that nobody has polled tells nobody anything: until then its work counts. */
static int work_over(const struct qp *qp, uint64_t start, uint64_t length)
{
    int ways = 0;

    for (uint64_t s = qp->retired; s < qp->posted; s++) {
        const struct turn_wr *wr = &qp->sq[s % qp->caps.send_depth].wr;

        if (wr->opcode != TURN_BIND_WINDOW && wr->opcode != TURN_LOCAL_INV && !(wr->flags & TURN_INLINE))
            ways += overlap(start, length, wr->local_addr, wr->length);
    }
    for (uint64_t s = qp->rq_taken; s < qp->rq_posted; s++) {
        const struct turn_recv *recv = &qp->rq[s % qp->caps.recv_depth];

        ways += overlap(start, length, recv->addr, recv->length);
    }
    return ways;
}

int fake_device_reaches(uint64_t address, uint64_t start, uint64_t length)
{
    struct device *device = live(address, KIND_DEVICE);
    int ways = 0;

    if (!device)
        return -EBADF;
    fake_lock();
    for (struct object *o = device->object.fabric->objects; o; o = o->next) {
        const struct mw *mw = (const struct mw *)o;

        if (o->device != device)
            continue;
        if (o->kind == KIND_MW && mw->bound)
            ways += overlap(start, length, mw->address, mw->length);
        if (o->kind == KIND_QP)
            ways += work_over((const struct qp *)o, start, length);
    }
    return locked_return(ways);
}

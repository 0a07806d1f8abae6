/* scripted_calls.c: the calls of turn.h on the fake device. */
#define _GNU_SOURCE
#include "scripted_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int turn_abi(void)
{
    return TURN_ABI;
}

uint32_t turn_sizes(void)
{
    return (uint32_t)sizeof(struct turn_wr) | (uint32_t)sizeof(struct turn_recv) << 8 |
           (uint32_t)sizeof(struct turn_wc) << 16 | (uint32_t)sizeof(struct turn_qp_attr) << 24;
}

/* ---- posting ------------------------------------------------------------------------------------------------ */

static int check_send(const struct qp *qp, const struct turn_wr *wr)
{
    if (wr->opcode > TURN_LOCAL_INV || wr->length > UINT32_MAX)
        return wr->opcode > TURN_LOCAL_INV ? -EINVAL : wr->opcode == TURN_BIND_WINDOW ? 0 : -EMSGSIZE;
    if (wr->opcode == TURN_BIND_WINDOW && (!live(wr->window, KIND_MW) || !live(wr->region, KIND_MR)))
        return -EINVAL;
    if (wr->flags & TURN_INLINE) {
        if (wr->length > qp->caps.inline_bytes)
            return -EINVAL;
        /* rxe takes an inline READ and fails it later */
        if (wr->opcode == TURN_READ && !is_rxe(&qp->object))
            return -EINVAL;
    }
    return qp->posted - qp->retired >= qp->caps.send_depth ? -ENOMEM : 0;
}

static void take_send(struct qp *qp, const struct turn_wr *wr)
{
    struct wqe *wqe = &qp->sq[qp->posted % qp->caps.send_depth];

    memset(wqe, 0, offsetof(struct wqe, payload));
    wqe->wr = *wr;
    if (wr->opcode == TURN_BIND_WINDOW && wr->remote_addr & TURN_KEY_NOW)
        turn_set_window_key(wr->window, (uint32_t)wr->remote_addr);
    if (wr->flags & TURN_INLINE && wr->opcode != TURN_READ)
        memcpy(wqe->payload, (const void *)(uintptr_t)wr->local_addr, wr->length);
    fake_match_rules(qp->object.device, wr->opcode, wqe);
    qp->posted++;
}

int turn_post_send(uint64_t address, const struct turn_wr *wrs, uint32_t count, uint32_t *accepted)
{
    struct qp *qp = live(address, KIND_QP);
    int rc = 0;

    *accepted = 0;
    if (!qp)
        return -EBADF;
    fake_lock();
    if (qp->state != QPS_RTS && qp->state != QPS_ERR) {
        rc = -EINVAL;
        if (is_rxe(&qp->object))
            *accepted = UINT32_MAX; /* rxe queues it, then fails the doorbell */
    }
    for (uint32_t i = 0; i < count && !rc; i++) {
        struct fake_rule *refuse = fake_next_match(qp->object.device, wrs[i].opcode, FAKE_REFUSE);

        rc = refuse ? -(int)refuse->status : check_send(qp, &wrs[i]);
        if (!rc) {
            take_send(qp, &wrs[i]);
            *accepted = i + 1;
        } else if (refuse && !refuse->vendor_err_or_known) {
            *accepted = UINT32_MAX;
        }
    }
    fake_advance(qp);
    fake_unlock();
    return rc;
}

/* ---- completions -------------------------------------------------------------------------------------------- */

static uint32_t poll_locked(struct cq *cq, struct turn_wc *out, uint32_t max)
{
    uint32_t count = cq->ready.count < max ? cq->ready.count : max;

    for (uint32_t i = 0; i < count; i++) {
        struct entry *entry = &cq->ready.items[i];

        out[i] = entry->wc;
        /* A polled completion gives back its slot and those of unsignaled requests before it. */
        if (entry->of_send && entry->qp->retired <= entry->sequence)
            entry->qp->retired = entry->sequence + 1;
    }
    cq->ready.count -= count;
    memmove(cq->ready.items, cq->ready.items + count, cq->ready.count * sizeof *cq->ready.items);
    return count;
}

/* The lock comes first: a poller that is still running when its queue is destroyed must meet the end of the queue. */
int turn_poll(uint64_t address, struct turn_wc *out, uint32_t max)
{
    struct cq *cq;
    int count = -EBADF;

    fake_lock();
    cq = live(address, KIND_CQ);
    if (cq) {
        fake_step(cq->object.device, FAKE_BEFORE_POLL);
        count = cq->ready.count ? (int)poll_locked(cq, out, max) : 0;
        if (!count)
            fake_step(cq->object.device, FAKE_AFTER_POLL);
    }
    fake_unlock();
    return count;
}

void fake_signal(struct cq *cq)
{
    uint64_t one = 1;

    if (!cq->channel)
        return;
    cq->pending_events++;
    if (write(cq->channel->fd, &one, sizeof one) < 0)
        abort();
}

int turn_arm(uint64_t address)
{
    struct cq *cq = live(address, KIND_CQ);

    if (!cq)
        return -EBADF;
    fake_lock();
    fake_step(cq->object.device, FAKE_BEFORE_ARM);
    cq->armed = true;
    fake_step(cq->object.device, FAKE_AFTER_ARM);
    fake_unlock();
    return 0;
}

int turn_drain_events(uint64_t address, uint64_t cq)
{
    struct channel *channel = live(address, KIND_CHANNEL);
    uint64_t events = 0;

    (void)cq;
    if (!channel)
        return -EBADF;
    fake_lock();
    fake_step(channel->object.device, FAKE_BEFORE_DRAIN);
    if (read(channel->fd, &events, sizeof events) < 0)
        events = 0;
    for (struct object *o = channel->object.fabric->objects; o; o = o->next)
        if (o->kind == KIND_CQ && ((struct cq *)o)->channel == channel)
            ((struct cq *)o)->pending_events = 0;
    fake_step(channel->object.device, FAKE_AFTER_DRAIN);
    fake_unlock();
    return (int)events;
}

void turn_before_sleep(uint64_t address)
{
    struct channel *channel = live(address, KIND_CHANNEL);

    if (!channel)
        return;
    fake_lock();
    fake_step(channel->object.device, FAKE_BEFORE_SLEEP);
    fake_unlock();
}

int turn_channel_fd(uint64_t address)
{
    struct channel *channel = live(address, KIND_CHANNEL);

    return channel ? channel->fd : -EBADF;
}

void turn_set_window_key(uint64_t address, uint32_t key)
{
    struct mw *mw = live(address, KIND_MW);

    if (mw)
        mw->object_key = key;
}

uint32_t turn_window_key(uint64_t address)
{
    struct mw *mw = live(address, KIND_MW);

    return mw ? mw->object_key : 0;
}

/* ---- queue pair states -------------------------------------------------------------------------------------- */

static struct device *device_of_gid(struct fabric *fabric, const uint8_t *gid)
{
    for (struct object *o = fabric->objects; o; o = o->next)
        for (int i = 0; o->kind == KIND_DEVICE && i < GID_ENTRIES; i++)
            if (!memcmp(((struct device *)o)->gids[i], gid, 16))
                return (struct device *)o;
    return NULL;
}

static struct device *device_of_lid(struct fabric *fabric, uint32_t lid)
{
    for (struct object *o = fabric->objects; o; o = o->next)
        if (o->kind == KIND_DEVICE && lid && ((struct device *)o)->lid == lid)
            return (struct device *)o;
    return NULL;
}

static struct device *far_device(struct qp *qp)
{
    if (qp->attr.is_global)
        return device_of_gid(qp->object.fabric, qp->attr.dgid);
    return device_of_lid(qp->object.fabric, qp->attr.dlid);
}

static bool answers_to(struct qp *peer, struct qp *qp)
{
    const uint8_t *gid = qp->object.device->gids[qp->attr.sgid_index % GID_ENTRIES];

    return peer->attr.is_global ? !memcmp(peer->attr.dgid, gid, 16) : peer->attr.dlid == qp->object.device->lid;
}

/* The queue pair that would answer, or NULL: also when its answers would not come back. */
struct qp *fake_peer_of(struct qp *qp)
{
    struct device *device = far_device(qp);

    if (!device || !device->active)
        return NULL;
    for (struct object *o = qp->object.fabric->objects; o; o = o->next) {
        struct qp *peer = (struct qp *)o;

        if (o->kind == KIND_QP && o->device == device && peer->num == qp->attr.dest_qpn &&
            (peer->state == QPS_RTR || peer->state == QPS_RTS))
            return peer->attr.dest_qpn == qp->num && answers_to(peer, qp) &&
                           peer->attr.rq_psn == qp->attr.sq_psn
                       ? peer
                       : NULL;
    }
    return NULL;
}

static void reset(struct qp *qp)
{
    memset(&qp->attr, 0, sizeof qp->attr);
    qp->retired = qp->completed = qp->executed = qp->posted = 0;
    qp->rq_taken = qp->rq_posted = 0; /* a shared queue keeps its receives */
    fake_end_qp(qp);
}

/* Where the other side is, as a device checks it: -errno, or 0. */
static int check_route(const struct qp *qp, const struct turn_qp_attr *attr)
{
    static const uint8_t no_gid[16];
    const struct device *device = qp->object.device;
    struct fabric *fabric = qp->object.fabric;

    if (!attr->is_global) /* RoCE has no other route than a global one */
        return !device->lid || !attr->dlid ? -EINVAL : device_of_lid(fabric, attr->dlid) ? 0 : -ETIMEDOUT;
    if (attr->sgid_index >= GID_ENTRIES)
        return -EINVAL;
    if (!memcmp(device->gids[attr->sgid_index], no_gid, sizeof no_gid))
        return -ENODATA;
    if (!memcmp(attr->dgid, no_gid, sizeof no_gid) || !device_of_gid(fabric, attr->dgid))
        return -ETIMEDOUT; /* the neighbour does not answer */
    return 0;
}

static int to_rtr(struct qp *qp, const struct turn_qp_attr *attr)
{
    int rc;

    if (attr->path_mtu < 256 || attr->path_mtu > 4096 || attr->path_mtu & (attr->path_mtu - 1) || attr->port != 1)
        return -EINVAL;
    rc = check_route(qp, attr);
    if (rc)
        return rc;
    memcpy(qp->attr.dgid, attr->dgid, sizeof attr->dgid);
    qp->attr.is_global = attr->is_global;
    qp->attr.dlid = attr->dlid;
    qp->attr.service_level = attr->service_level;
    qp->attr.traffic_class = attr->traffic_class;
    qp->attr.path_mtu = attr->path_mtu;
    qp->attr.dest_qpn = attr->dest_qpn;
    qp->attr.rq_psn = attr->rq_psn;
    qp->attr.max_dest_rd_atomic = attr->max_dest_rd_atomic;
    qp->attr.sgid_index = attr->sgid_index;
    return 0;
}

static int modify(struct qp *qp, const struct turn_qp_attr *attr)
{
    int rc = 0;

    if (attr->state == QPS_RESET) {
        reset(qp);
    } else if (attr->state == QPS_ERR) {
        if (qp->state == QPS_RESET)
            return -EINVAL;
        fake_to_error(qp);
    } else if (attr->state == QPS_INIT && (qp->state == QPS_RESET || qp->state == QPS_INIT)) {
        if (attr->port != 1 || attr->pkey_index >= qp->object.device->pkey_count)
            return -EINVAL;
        qp->attr.access = attr->access;
        qp->attr.pkey_index = attr->pkey_index;
    } else if (attr->state == QPS_RTR && qp->state == QPS_INIT) {
        rc = to_rtr(qp, attr);
    } else if (attr->state == QPS_RTS && qp->state == QPS_RTR) {
        qp->attr.sq_psn = attr->sq_psn;
        qp->attr.rd_atomic = attr->rd_atomic;
        qp->attr.timeout = attr->timeout;
        qp->attr.retry_cnt = attr->retry_cnt;
        qp->attr.rnr_retry = attr->rnr_retry;
    } else {
        return -EINVAL;
    }
    if (!rc) {
        qp->state = (enum qp_state)attr->state;
        qp->attr.state = attr->state;
        fake_wake_senders(qp);
    }
    return rc;
}

int turn_modify(uint64_t modify_fn, uint64_t address, const struct turn_qp_attr *attr)
{
    struct qp *qp = live(address, KIND_QP);
    int rc;

    (void)modify_fn;
    if (!qp)
        return -EBADF;
    if (attr->state == QPS_RTR && qp->object.device->rtr_delay_us) {
        uint32_t us = qp->object.device->rtr_delay_us;
        struct timespec delay = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};

        nanosleep(&delay, NULL);
    }
    fake_lock();
    rc = modify(qp, attr);
    fake_unlock();
    return rc;
}

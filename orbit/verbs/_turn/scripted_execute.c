/* scripted_execute.c: what a posted work request does, by the InfiniBand specification; rdma_rxe's measured departures
 * where the fabric is in that mode.
 *
 * A queue pair executes its requests in order and at once, as far as nothing holds them: a peer that is not there yet
 * (endless retries), a missing receive (endless RNR retries), a scripted delay, or a fence behind a delayed READ.
 */
#include "scripted_state.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCKED = UINT32_MAX, AWAIT = UINT32_MAX - 1 };
enum { FLAG_GRH = 1, FLAG_WITH_INV = 8, FLAG_WITH_INV_RXE = 4 };

static const uint8_t wc_opcode[] = {
    [TURN_SEND] = 0, [TURN_SEND_WITH_INV] = 0, [TURN_READ] = 2, [TURN_WRITE] = 1, [TURN_BIND_WINDOW] = 5, [TURN_LOCAL_INV] = 6,
};

static bool inside(uint64_t address, uint64_t length, uint64_t start, uint64_t size)
{
    return address >= start && length <= size && address - start <= size - length;
}

static struct object *key_owner(struct device *device, uint32_t key)
{
    uint32_t index = key >> 8;

    return index < KEY_INDICES ? device->keys[index].owner : NULL;
}

/* ---- completion queues -------------------------------------------------------------------------------------- */

void fake_append(struct entries *to, const struct entry *entry)
{
    if (to->count == to->capacity) {
        uint32_t capacity = to->capacity ? 2 * to->capacity : 16;
        struct entry *items = realloc(to->items, capacity * sizeof *items);

        if (!items)
            abort(); /* a test without memory proves nothing */
        to->items = items;
        to->capacity = capacity;
    }
    to->items[to->count++] = *entry;
}

void fake_enqueue(struct cq *cq, const struct entry *entry)
{
    if (cq->ready.count >= cq->depth) {
        cq->object.device->counters.overruns++;
        if (is_rxe(&cq->object) || !cq->overrun)
            fake_emit(&cq->object, EVENT_CQ_ERR); /* rxe: one for each */
        if (is_rxe(&cq->object) || cq->overrun)
            return; /* rxe loses the completion and goes on */
        cq->overrun = true;
        for (struct object *o = cq->object.fabric->objects; o; o = o->next) {
            struct qp *qp = (struct qp *)o;

            if (o->kind == KIND_QP && (qp->send_cq == cq || qp->recv_cq == cq))
                fake_to_error(qp);
        }
        return;
    }
    fake_append(&cq->ready, entry);
    if (cq->armed) {
        cq->armed = false;
        fake_signal(cq);
    }
}

void fake_complete(struct cq *cq, const struct entry *entry, const struct wqe *wqe)
{
    bool hold = wqe->hold;

    if (wqe->lose)
        return;
    for (uint32_t i = 0; i < cq->held.count && !hold; i++)
        hold = cq->held.items[i].qp == entry->qp && cq->held.items[i].of_send == entry->of_send;
    for (int copies = wqe->duplicate ? 2 : 1; copies; copies--) {
        if (hold)
            fake_append(&cq->held, entry);
        else
            fake_enqueue(cq, entry);
    }
}

static void complete_send(struct qp *qp, uint64_t sequence, uint32_t status)
{
    struct wqe *wqe = &qp->sq[sequence % qp->caps.send_depth];
    struct entry entry = {.qp = qp, .sequence = sequence, .of_send = true};
    bool defined = status == WC_SUCCESS || is_rxe(&qp->object);

    entry.wc.wr_id = wqe->wr.wr_id;
    entry.wc.status = status;
    entry.wc.opcode = defined ? wc_opcode[wqe->wr.opcode] : WC_OP_UNDEFINED;
    entry.wc.byte_len = status == WC_SUCCESS && wqe->wr.opcode == TURN_READ ? (uint32_t)wqe->wr.length : 0;
    entry.wc.qp_num = qp->num;
    entry.wc.vendor_err = wqe->vendor_err;
    if (status == WC_WR_FLUSH_ERR)
        qp->object.device->counters.flushed++;
    if (status != WC_SUCCESS || wqe->wr.flags & TURN_SIGNALED)
        fake_complete(qp->send_cq, &entry, wqe);
}

/* Everything outstanding flushes in order, signaled or not; delayed payloads are never written. */
void fake_to_error(struct qp *qp)
{
    if (qp->state != QPS_ERR) {
        qp->state = QPS_ERR;
        qp->attr.state = QPS_ERR;
        if (qp->srq && !is_rxe(&qp->object)) /* rxe never says so */
            fake_emit(&qp->object, EVENT_QP_LAST_WQE_REACHED);
    }
    while (qp->completed < qp->posted)
        complete_send(qp, qp->completed++, WC_WR_FLUSH_ERR);
    qp->executed = qp->posted;
    fake_flush_recv(qp);
}

/* ---- authority ---------------------------------------------------------------------------------------------- */

static bool local_ok(const struct pd *pd, uint64_t address, uint64_t length, uint32_t lkey, uint32_t access)
{
    struct mr *mr = (struct mr *)key_owner(pd->object.device, lkey);

    return mr && mr->object.kind == KIND_MR && mr->key == lkey && mr->pd == pd &&
           (mr->access & access) == access && inside(address, length, mr->address, mr->length);
}

/* Of a READ or WRITE at its responder. */
static bool remote_ok(struct qp *peer, const struct turn_wr *wr, uint32_t access)
{
    struct object *owner = key_owner(peer->object.device, wr->rkey);
    struct mr *mr = (struct mr *)owner;
    struct mw *mw = (struct mw *)owner;

    if (!owner)
        return false;
    if (owner->kind == KIND_MR)
        return mr->key == wr->rkey && mr->pd == peer->pd && mr->access & access &&
               inside(wr->remote_addr, wr->length, mr->address, mr->length);
    if (mw->key != wr->rkey || !mw->bound || mw->qp != peer || mw->pd != peer->pd || !(mw->access & access))
        return false;
    if (is_rxe(owner)) /* rxe checks the parent's range only */
        return inside(wr->remote_addr, wr->length, mw->mr->address, mw->mr->length);
    return inside(wr->remote_addr, wr->length, mw->address, mw->length);
}

void fake_unbind(struct mw *mw)
{
    if (mw->bound) {
        mw->bound = false;
        mw->mr->windows--;
        mw->mr = NULL;
        mw->qp = NULL;
    }
}

static uint32_t bind_window(struct qp *qp, const struct turn_wr *wr)
{
    struct device *device = qp->object.device;
    struct mw *mw = live(wr->window, KIND_MW);
    struct mr *mr = live(wr->region, KIND_MR);
    uint8_t *bound;
    uint32_t tag = wr->rkey % TAGS;
    uint32_t access = (wr->access & TURN_REMOTE_READ ? FAKE_REMOTE_READ : 0) |
                      (wr->access & TURN_REMOTE_WRITE ? FAKE_REMOTE_WRITE : 0);

    if (!device->windows || !mw || !mr || mw->pd != qp->pd || mr->pd != qp->pd || mw->bound)
        return WC_MW_BIND_ERR;
    if (wr->rkey >> 8 != mw->key >> 8 || (is_rxe(&qp->object) && mw->object_key != mw->key))
        return WC_MW_BIND_ERR; /* rxe: the caller did not write the last key back */
    if (!(mr->access & FAKE_MW_BIND) || (access & FAKE_REMOTE_WRITE && !(mr->access & FAKE_LOCAL_WRITE)))
        return WC_MW_BIND_ERR;
    if (!wr->length || !inside(wr->local_addr, wr->length, mr->address, mr->length))
        return WC_MW_BIND_ERR;
    mw->bound = true;
    mw->key = wr->rkey;
    mw->mr = mr;
    mw->qp = qp;
    mw->address = wr->local_addr;
    mw->length = wr->length;
    mw->access = access;
    mr->windows++;
    bound = &qp->pd->bound[wr->rkey >> 8][tag / 8];
    if (*bound >> tag % 8 & 1)
        device->counters.keys_reused++;
    *bound |= (uint8_t)(1 << tag % 8);
    device->counters.binds++;
    return WC_SUCCESS;
}

/* A window by its key, for the queue pair that may invalidate it; false leaves everything as it was. */
static bool invalidate(struct qp *qp, uint32_t key)
{
    struct device *device = qp->object.device;
    struct mw *mw = (struct mw *)key_owner(device, key);

    if (!mw || mw->object.kind != KIND_MW || mw->key != key)
        return false;
    if (!mw->bound) {
        device->counters.double_invalidates++;
        return false;
    }
    if (mw->pd != qp->pd || (mw->qp != qp && !is_rxe(&qp->object)))
        return false;
    fake_unbind(mw);
    device->counters.invalidates++;
    return true;
}

/* ---- execution ---------------------------------------------------------------------------------------------- */

static const void *source_of(const struct wqe *wqe)
{
    return wqe->wr.flags & TURN_INLINE ? (const void *)wqe->payload : (const void *)(uintptr_t)wqe->wr.local_addr;
}

static bool payload_ok(struct qp *qp, const struct wqe *wqe)
{
    return !wqe->wr.length || wqe->wr.flags & TURN_INLINE ||
           local_ok(qp->pd, wqe->wr.local_addr, wqe->wr.length, wqe->wr.lkey, 0);
}

/* A request that its responder refuses. */
static uint32_t fail_both(struct qp *peer, uint32_t status)
{
    if (!is_rxe(&peer->object)) /* rxe raises no event about a queue pair */
        fake_emit(&peer->object, status == WC_REM_ACCESS_ERR ? EVENT_QP_ACCESS_ERR : EVENT_QP_REQ_ERR);
    fake_to_error(peer);
    return status;
}

static uint32_t execute_read(struct qp *qp, struct qp *peer, struct wqe *wqe)
{
    const struct turn_wr *wr = &wqe->wr;

    if (!qp->attr.rd_atomic)
        return is_rxe(&qp->object) ? (uint32_t)BLOCKED : WC_LOC_QP_OP_ERR;
    if (!(peer->attr.access & FAKE_REMOTE_READ) || !peer->attr.max_dest_rd_atomic)
        return fail_both(peer, WC_REM_INV_REQ_ERR);
    if (wr->length && !remote_ok(peer, wr, FAKE_REMOTE_READ))
        return fail_both(peer, WC_REM_ACCESS_ERR);
    if (wr->length && (wr->flags & TURN_INLINE ||
                       !local_ok(qp->pd, wr->local_addr, wr->length, wr->lkey, FAKE_LOCAL_WRITE)))
        return WC_LOC_PROT_ERR;
    if (wqe->delay)
        return AWAIT;
    memmove((void *)(uintptr_t)wr->local_addr, (const void *)(uintptr_t)wr->remote_addr, wr->length);
    peer->object.device->counters.sent_bytes += wr->length;
    return WC_SUCCESS;
}

static uint32_t execute_write(struct qp *qp, struct qp *peer, struct wqe *wqe)
{
    const struct turn_wr *wr = &wqe->wr;

    if (!payload_ok(qp, wqe))
        return is_rxe(&qp->object) ? WC_LOC_QP_OP_ERR : WC_LOC_PROT_ERR;
    if (!(peer->attr.access & FAKE_REMOTE_WRITE))
        return fail_both(peer, WC_REM_INV_REQ_ERR);
    if (wr->length && !remote_ok(peer, wr, FAKE_REMOTE_WRITE))
        return fail_both(peer, WC_REM_ACCESS_ERR);
    if (wqe->delay)
        return AWAIT;
    memmove((void *)(uintptr_t)wr->remote_addr, source_of(wqe), wr->length);
    qp->object.device->counters.sent_bytes += wr->length;
    return WC_SUCCESS;
}

static uint32_t execute_send(struct qp *qp, struct qp *peer, struct wqe *wqe)
{
    const struct turn_wr *wr = &wqe->wr;
    bool rxe = is_rxe(&qp->object);
    struct entry entry = {.qp = peer};
    struct wqe received = {.wr.opcode = 0};
    struct turn_recv *recv;
    uint32_t status = WC_SUCCESS;

    if (!payload_ok(qp, wqe))
        return WC_LOC_PROT_ERR;
    recv = fake_take_recv(peer);
    if (!recv) {
        peer->object.device->counters.receiver_not_ready += !wqe->met_no_receive;
        wqe->met_no_receive = true;
        return qp->attr.rnr_retry == 7 ? (uint32_t)BLOCKED : WC_RNR_RETRY_EXC_ERR;
    }
    fake_match_rules(peer->object.device, FAKE_RECV, &received);
    entry.wc.wr_id = recv->wr_id;
    entry.wc.opcode = WC_OP_RECV;
    entry.wc.qp_num = peer->num;
    if (received.fail) {
        entry.wc.status = received.status;
        status = WC_REM_OP_ERR;
    } else if (wr->length > recv->length) {
        entry.wc.status = rxe ? WC_LOC_QP_OP_ERR : WC_LOC_LEN_ERR;
        status = rxe ? WC_REM_OP_ERR : WC_REM_INV_REQ_ERR;
    } else if (wr->length && !local_ok(fake_recv_pd(peer), recv->addr, wr->length, recv->lkey, FAKE_LOCAL_WRITE)) {
        entry.wc.status = WC_LOC_PROT_ERR;
        status = WC_REM_OP_ERR;
    } else {
        memmove((void *)(uintptr_t)recv->addr, source_of(wqe), wr->length);
        qp->object.device->counters.sent_bytes += wr->length;
        entry.wc.byte_len = (uint32_t)wr->length;
        entry.wc.wc_flags = rxe ? FLAG_GRH : 0;
        if (wr->opcode == TURN_SEND_WITH_INV && invalidate(peer, wr->rkey)) {
            entry.wc.wc_flags |= rxe ? FLAG_WITH_INV_RXE : FLAG_WITH_INV;
            entry.wc.invalidated = wr->rkey;
        } else if (wr->opcode == TURN_SEND_WITH_INV) {
            entry.wc.status = WC_REM_INV_REQ_ERR; /* class J: the sender has its acknowledgement already */
        }
    }
    fake_complete(peer->recv_cq, &entry, &received);
    if (entry.wc.status != WC_SUCCESS)
        fake_to_error(peer);
    return status;
}

static uint32_t execute(struct qp *qp, struct wqe *wqe)
{
    const struct turn_wr *wr = &wqe->wr;
    bool rxe = is_rxe(&qp->object);
    struct qp *peer;

    if (wqe->fail)
        return wqe->status;
    if (wr->opcode == TURN_BIND_WINDOW)
        return bind_window(qp, wr);
    if (wr->opcode == TURN_LOCAL_INV)
        return invalidate(qp, wr->rkey) ? WC_SUCCESS : rxe ? WC_LOC_QP_OP_ERR : WC_MW_BIND_ERR;
    if (!qp->object.device->active)
        return rxe ? WC_LOC_QP_OP_ERR : WC_RETRY_EXC_ERR;
    if (!rxe && wr->length > qp->object.device->message_max)
        return WC_LOC_LEN_ERR;
    peer = fake_peer_of(qp);
    if (!peer) /* retry count 7 is for ever on rxe */
        return rxe && qp->attr.retry_cnt == 7 ? (uint32_t)BLOCKED : WC_RETRY_EXC_ERR;
    if (wr->opcode == TURN_READ)
        return execute_read(qp, peer, wqe);
    if (wr->opcode == TURN_WRITE)
        return execute_write(qp, peer, wqe);
    return execute_send(qp, peer, wqe);
}

/* Deliver what is done, in order. An error moves the queue pair. */
static void complete_done(struct qp *qp)
{
    while (qp->state == QPS_RTS && qp->completed < qp->executed) {
        struct wqe *wqe = &qp->sq[qp->completed % qp->caps.send_depth];

        if (wqe->phase != PHASE_DONE)
            return;
        complete_send(qp, qp->completed++, wqe->status);
        if (wqe->status != WC_SUCCESS)
            fake_to_error(qp);
        else if (is_rxe(&qp->object))
            qp->retired = qp->completed;
    }
}

/* May the next request start behind a delayed one? Not behind a WRITE, and not if it is fenced. */
static bool may_start(struct qp *qp, const struct wqe *wqe)
{
    for (uint64_t s = qp->completed; s < qp->executed; s++) {
        const struct wqe *before = &qp->sq[s % qp->caps.send_depth];

        if (before->phase == PHASE_DONE && before->status != WC_SUCCESS)
            return false;
        if (before->phase == PHASE_AWAITING && (before->wr.opcode == TURN_WRITE || wqe->wr.flags & TURN_FENCE))
            return false;
    }
    return true;
}

void fake_advance(struct qp *qp)
{
    if (qp->advancing)
        return; /* loopback onto itself */
    qp->advancing = true;
    while (qp->state == QPS_RTS && qp->executed < qp->posted) {
        struct wqe *wqe = &qp->sq[qp->executed % qp->caps.send_depth];
        uint32_t status;

        if (!may_start(qp, wqe))
            break;
        status = execute(qp, wqe);
        if (status == (uint32_t)BLOCKED || qp->state != QPS_RTS)
            break;
        wqe->phase = status == (uint32_t)AWAIT ? PHASE_AWAITING : PHASE_DONE;
        wqe->status = status == (uint32_t)AWAIT ? WC_SUCCESS : status;
        qp->executed++;
        complete_done(qp);
    }
    qp->advancing = false;
    if (qp->state == QPS_ERR)
        fake_to_error(qp); /* what was posted to a dead queue pair */
}

int fake_release_payloads(struct qp *qp)
{
    int released = 0;

    for (uint64_t s = qp->completed; qp->state == QPS_RTS && s < qp->executed; s++) {
        struct wqe *wqe = &qp->sq[s % qp->caps.send_depth];

        if (wqe->phase != PHASE_AWAITING)
            continue;
        wqe->delay = false;
        wqe->status = execute(qp, wqe); /* its authority may be gone by now */
        if (wqe->status == (uint32_t)BLOCKED)
            continue;
        wqe->phase = PHASE_DONE;
        released++;
        if (wqe->status != WC_SUCCESS)
            break;
    }
    complete_done(qp);
    fake_advance(qp);
    return released;
}

/* scripted_receives.c: the fake's receives: posted to a queue pair or to a queue that several of them share, taken by
 * incoming SENDs, flushed with the queue pair only where they are its own.
 */
#include "scripted_state.h"

#include <errno.h>
#include <stdlib.h>

uint64_t fake_srq_new(uint64_t address, uint32_t depth, int *error)
{
    struct pd *pd = live(address, KIND_PD);
    struct srq *srq;

    *error = !pd ? -EBADF : depth ? 0 : -EINVAL;
    if (*error)
        return 0;
    fake_lock();
    srq = fake_make_in(pd->object.context, KIND_SRQ, sizeof *srq);
    fake_adopt(&srq->object, 0, &pd->object);
    srq->pd = pd;
    srq->depth = fake_granted(&srq->object, depth);
    srq->rq = calloc(srq->depth, sizeof *srq->rq);
    if (!srq->rq)
        abort();
    fake_unlock();
    return (uint64_t)(uintptr_t)srq;
}

uint32_t fake_srq_depth(uint64_t address)
{
    struct srq *srq = live(address, KIND_SRQ);

    return srq ? srq->depth : 0;
}

/* One-shot: the limit is 0 again once it was told. */
static void check_limit(struct srq *srq)
{
    if (srq->limit && srq->posted - srq->taken < srq->limit) {
        srq->limit = 0;
        fake_emit(&srq->object, EVENT_SRQ_LIMIT_REACHED);
    }
}

int fake_srq_arm(uint64_t address, uint32_t limit)
{
    struct srq *srq = live(address, KIND_SRQ);

    if (!srq)
        return -EBADF;
    if (limit > srq->depth)
        return -EINVAL;
    fake_lock();
    srq->limit = limit;
    if (srq->object.device->limit_at_arm)
        check_limit(srq);
    fake_unlock();
    return 0;
}

/* The domain whose registrations the receives of a queue pair may name. */
struct pd *fake_recv_pd(const struct qp *qp)
{
    return qp->srq ? qp->srq->pd : qp->pd;
}

/* The next receive of a queue pair, or NULL: it is not ready. Valid until the next post. */
struct turn_recv *fake_take_recv(struct qp *qp)
{
    struct srq *srq = qp->srq;
    struct turn_recv *taken;

    if (!srq)
        return qp->rq_taken == qp->rq_posted ? NULL : &qp->rq[qp->rq_taken++ % qp->caps.recv_depth];
    if (srq->taken == srq->posted)
        return NULL;
    taken = &srq->rq[srq->taken++ % srq->depth];
    check_limit(srq);
    return taken;
}

/* Of its own receives: a shared queue's wait for another queue pair. */
void fake_flush_recv(struct qp *qp)
{
    while (qp->rq_taken < qp->rq_posted) {
        struct entry entry = {.qp = qp};
        struct wqe wqe = {.wr.opcode = 0};

        entry.wc.wr_id = qp->rq[qp->rq_taken++ % qp->caps.recv_depth].wr_id;
        entry.wc.status = WC_WR_FLUSH_ERR;
        entry.wc.opcode = is_rxe(&qp->object) ? WC_OP_RECV : WC_OP_UNDEFINED;
        entry.wc.qp_num = qp->num;
        qp->object.device->counters.flushed++;
        fake_match_rules(qp->object.device, FAKE_RECV, &wqe);
        fake_complete(qp->recv_cq, &entry, &wqe);
    }
}

/* Queue pairs that wait for this one: for its state, or for a receive. */
void fake_wake_senders(const struct qp *qp)
{
    for (struct object *o = qp->object.fabric->objects; o; o = o->next) {
        struct qp *sender = (struct qp *)o;

        if (o->kind == KIND_QP && sender->attr.dest_qpn == qp->num && sender->state == QPS_RTS)
            fake_advance(sender);
    }
}

/* Copy into a ring of `depth` of which `*posted` - `taken` are in use. */
static int post(struct device *device, struct turn_recv *ring, uint32_t depth, uint64_t taken, uint64_t *posted,
                const struct turn_recv *recvs, uint32_t count, uint32_t *accepted)
{
    for (uint32_t i = 0; i < count; i++) {
        struct fake_rule *refuse = fake_next_match(device, FAKE_RECV, FAKE_REFUSE);

        if (refuse) {
            if (!refuse->vendor_err_or_known)
                *accepted = UINT32_MAX;
            return -(int)refuse->status;
        }
        if (*posted - taken >= depth)
            return -ENOMEM;
        ring[(*posted)++ % depth] = recvs[i];
        *accepted = i + 1;
    }
    return 0;
}

int turn_post_recv(uint64_t address, const struct turn_recv *recvs, uint32_t count, uint32_t *accepted)
{
    struct qp *qp = live(address, KIND_QP);
    int rc = -EINVAL;

    *accepted = 0;
    if (!qp)
        return -EBADF;
    fake_lock();
    if (qp->state != QPS_RESET && !qp->srq)
        rc = post(qp->object.device, qp->rq, qp->caps.recv_depth, qp->rq_taken, &qp->rq_posted, recvs, count, accepted);
    if (qp->state == QPS_ERR)
        fake_flush_recv(qp);
    fake_wake_senders(qp);
    fake_unlock();
    return rc;
}

int turn_post_srq_recv(uint64_t address, const struct turn_recv *recvs, uint32_t count, uint32_t *accepted)
{
    struct srq *srq = live(address, KIND_SRQ);
    int rc;

    *accepted = 0;
    if (!srq)
        return -EBADF;
    fake_lock();
    rc = post(srq->object.device, srq->rq, srq->depth, srq->taken, &srq->posted, recvs, count, accepted);
    for (struct object *o = srq->object.fabric->objects; o; o = o->next)
        if (o->kind == KIND_QP && ((struct qp *)o)->srq == srq)
            fake_wake_senders((struct qp *)o);
    fake_unlock();
    return rc;
}

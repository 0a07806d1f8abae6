/* scripted.c: the fake device's objects: making and destroying. */
#define _GNU_SOURCE
#include "scripted_state.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fake_lock(void)
{
    pthread_mutex_lock(&lock);
}

void fake_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

static int locked_return(int value)
{
    fake_unlock();
    return value;
}

static uint64_t address_of(const void *object)
{
    return (uint64_t)(uintptr_t)object;
}

void *fake_make(struct fabric *fabric, enum kind kind, size_t size)
{
    struct object *object = calloc(1, size);

    if (!object)
        abort();
    object->kind = object->made_as = kind;
    object->fabric = fabric;
    object->next = fabric->objects;
    fabric->objects = object;
    return object;
}

void *fake_make_in(struct context *context, enum kind kind, size_t size)
{
    struct object *object = fake_make(context->object.fabric, kind, size);

    object->device = context->object.device;
    object->context = context;
    object->device->counters.live_objects++;
    return object;
}

void fake_adopt(struct object *child, int slot, struct object *parent)
{
    child->parents[slot] = parent;
    parent->children++;
}

uint64_t fake_fabric_new(uint32_t mode)
{
    struct fabric *fabric = calloc(1, sizeof *fabric);

    if (!fabric)
        abort();
    fabric->mode = mode;
    fabric->next_qpn = FIRST_QPN;
    return address_of(fabric);
}

static void free_object(struct object *object)
{
    switch (object->made_as) {
    case KIND_DEVICE:
        free(((struct device *)object)->keys);
        break;
    case KIND_PD:
        free(((struct pd *)object)->bound);
        break;
    case KIND_CONTEXT:
        if (object->kind != KIND_FREED)
            close(((struct context *)object)->fd);
        free(((struct context *)object)->events);
        break;
    case KIND_CHANNEL:
        if (object->kind != KIND_FREED)
            close(((struct channel *)object)->fd);
        break;
    case KIND_SRQ:
        free(((struct srq *)object)->rq);
        break;
    case KIND_CQ:
        free(((struct cq *)object)->ready.items);
        free(((struct cq *)object)->held.items);
        break;
    case KIND_QP:
        free(((struct qp *)object)->sq);
        free(((struct qp *)object)->rq);
        break;
    default:
        break;
    }
    free(object);
}

void fake_fabric_free(uint64_t address)
{
    struct fabric *fabric = (struct fabric *)(uintptr_t)address;
    struct object *next;

    fake_lock();
    for (struct object *object = fabric->objects; object; object = next) {
        next = object->next;
        free_object(object);
    }
    free(fabric);
    fake_unlock();
}

uint64_t fake_device_new(uint64_t address, int *error)
{
    struct fabric *fabric = (struct fabric *)(uintptr_t)address;
    struct device *device;

    *error = 0;
    fake_lock();
    device = fake_make(fabric, KIND_DEVICE, sizeof *device);
    device->object.device = device;
    device->active = device->windows = true;
    device->pkey_count = 1;
    device->message_max = 1 << 30;
    device->next_key_index = 1;
    device->keys = calloc(KEY_INDICES, sizeof *device->keys);
    if (!device->keys)
        abort();
    fake_unlock();
    return address_of(device);
}

/* The specification promises nothing about the keys of a new object, so that mode gives the worst that it allows: the
 * lowest free index and the same first tag again. rxe goes round and takes a random tag. */
static uint32_t new_key(struct device *device, struct object *owner)
{
    bool rxe = is_rxe(&device->object);

    for (uint32_t n = 1; n < KEY_INDICES; n++) {
        uint32_t index = rxe ? 1 + (device->next_key_index + n - 2) % (KEY_INDICES - 1) : n;

        if (device->keys[index].owner)
            continue;
        device->keys[index].owner = owner;
        device->next_key_index = index + 1;
        device->tag_seed = device->tag_seed * 1664525u + 1013904223u;
        return index << 8 | (rxe ? device->tag_seed >> 24 : 0);
    }
    return 0;
}

static void *child_of_pd(uint64_t address, enum kind kind, size_t size, int *error)
{
    struct pd *pd = live(address, KIND_PD);
    struct object *object;

    *error = pd ? 0 : -EBADF;
    if (!pd)
        return NULL;
    object = fake_make_in(pd->object.context, kind, size);
    fake_adopt(object, 0, &pd->object);
    return object;
}

static void unmake(struct object *object)
{
    object->kind = KIND_FREED;
    for (int i = 0; i < PARENTS_MAX; i++)
        if (object->parents[i])
            object->parents[i]->children--;
    object->device->counters.live_objects--;
}

uint64_t fake_pd_new(uint64_t address, int *error)
{
    struct context *context = live(address, KIND_CONTEXT);
    struct pd *pd;

    *error = context ? 0 : -EBADF;
    if (!context)
        return 0;
    fake_lock();
    pd = fake_make_in(context, KIND_PD, sizeof *pd);
    fake_adopt(&pd->object, 0, &context->object);
    pd->bound = calloc(KEY_INDICES, sizeof *pd->bound);
    if (!pd->bound)
        abort();
    fake_unlock();
    return address_of(pd);
}

uint64_t fake_mr_new(uint64_t pd, uint64_t address, uint64_t length, uint32_t access, int *error)
{
    struct mr *mr;

    /* Remote write or atomic access needs local write access. */
    if (!length || (access & FAKE_REMOTE_WRITE && !(access & FAKE_LOCAL_WRITE))) {
        *error = -EINVAL;
        return 0;
    }
    fake_lock();
    mr = child_of_pd(pd, KIND_MR, sizeof *mr, error);
    if (mr) {
        mr->pd = (struct pd *)mr->object.parents[0];
        mr->address = address;
        mr->length = length;
        mr->access = access;
        mr->key = new_key(mr->object.device, &mr->object);
        if (!mr->key) {
            unmake(&mr->object);
            *error = -ENOMEM;
            mr = NULL;
        }
    }
    fake_unlock();
    return address_of(mr);
}

uint32_t fake_mr_lkey(uint64_t address)
{
    struct mr *mr = live(address, KIND_MR);

    return mr ? mr->key : 0;
}

uint32_t fake_mr_rkey(uint64_t address)
{
    struct mr *mr = live(address, KIND_MR);

    if (!mr || (is_rxe(&mr->object) && !(mr->access & (FAKE_REMOTE_READ | FAKE_REMOTE_WRITE))))
        return 0; /* rxe has none without a remote flag */
    return mr->key;
}

uint64_t fake_mw_new(uint64_t pd, int *error)
{
    struct mw *mw;

    fake_lock();
    mw = child_of_pd(pd, KIND_MW, sizeof *mw, error);
    if (mw) {
        mw->pd = (struct pd *)mw->object.parents[0];
        mw->key = mw->object_key = mw->object.device->windows ? new_key(mw->object.device, &mw->object) : 0;
        if (!mw->key) {
            *error = mw->object.device->windows ? -ENOMEM : -EOPNOTSUPP;
            unmake(&mw->object);
            mw = NULL;
        }
    }
    fake_unlock();
    return address_of(mw);
}

uint64_t fake_channel_new(uint64_t address, int *error)
{
    struct context *context = live(address, KIND_CONTEXT);
    struct channel *channel;
    int fd;

    *error = context ? 0 : -EBADF;
    if (!context)
        return 0;
    fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fd < 0) {
        *error = -errno;
        return 0;
    }
    fake_lock();
    channel = fake_make_in(context, KIND_CHANNEL, sizeof *channel);
    fake_adopt(&channel->object, 0, &context->object);
    channel->fd = fd;
    fake_unlock();
    return address_of(channel);
}

uint32_t fake_granted(const struct object *object, uint32_t asked)
{
    uint32_t size = 2;

    if (!is_rxe(object))
        return asked;
    while (size - 1 < asked) /* rxe rounds up to 2^k - 1 */
        size *= 2;
    return size - 1;
}

uint64_t fake_cq_new(uint64_t address, uint32_t depth, uint64_t channel, int *error)
{
    struct context *context = live(address, KIND_CONTEXT);
    struct channel *on = live(channel, KIND_CHANNEL);
    struct cq *cq;

    *error = !context || (channel && !on) ? -EBADF : depth ? 0 : -EINVAL;
    if (*error)
        return 0;
    fake_lock();
    cq = fake_make_in(context, KIND_CQ, sizeof *cq);
    fake_adopt(&cq->object, 0, &context->object);
    cq->depth = fake_granted(&cq->object, depth);
    cq->channel = on;
    if (on)
        fake_adopt(&cq->object, 1, &on->object);
    fake_unlock();
    return address_of(cq);
}

/* What the device makes of what was asked for. */
static void grant(struct qp *qp, struct fake_qp_caps *caps)
{
    caps->send_depth = fake_granted(&qp->object, caps->send_depth);
    caps->recv_depth = qp->srq ? 0 : fake_granted(&qp->object, caps->recv_depth);
    if (is_rxe(&qp->object) && caps->inline_bytes < RXE_INLINE_MIN)
        caps->inline_bytes = RXE_INLINE_MIN;
    qp->caps = *caps;
    qp->sq = calloc(caps->send_depth, sizeof *qp->sq);
    qp->rq = calloc(caps->recv_depth + 1, sizeof *qp->rq);
    if (!qp->sq || !qp->rq)
        abort();
}

uint64_t fake_qp_new(uint64_t pd, uint64_t send_cq, uint64_t recv_cq, uint64_t shared, struct fake_qp_caps *caps,
                     int *error)
{
    struct cq *sends = live(send_cq, KIND_CQ), *recvs = live(recv_cq, KIND_CQ);
    struct srq *srq = live(shared, KIND_SRQ);
    struct qp *qp;

    *error = !sends || !recvs || (shared && !srq) ? -EBADF : -EINVAL;
    if (*error == -EBADF || !caps->send_depth || !(srq || caps->recv_depth) || caps->inline_bytes > INLINE_MAX)
        return 0;
    fake_lock();
    qp = child_of_pd(pd, KIND_QP, sizeof *qp, error);
    if (qp) {
        qp->pd = (struct pd *)qp->object.parents[0];
        fake_adopt(&qp->object, 1, &sends->object);
        fake_adopt(&qp->object, 2, &recvs->object);
        if (srq)
            fake_adopt(&qp->object, 3, &srq->object);
        qp->send_cq = sends;
        qp->recv_cq = recvs;
        qp->srq = srq;
        qp->num = qp->object.fabric->next_qpn++;
        grant(qp, caps);
    }
    fake_unlock();
    return address_of(qp);
}

uint32_t fake_qp_num(uint64_t address)
{
    struct qp *qp = live(address, KIND_QP);

    return qp ? qp->num : 0;
}

uint32_t fake_qp_state(uint64_t address)
{
    struct qp *qp = live(address, KIND_QP);

    return qp ? qp->state : UINT32_MAX;
}

int fake_qp_attributes(uint64_t address, struct turn_qp_attr *out)
{
    struct qp *qp = live(address, KIND_QP);

    if (!qp)
        return -EBADF;
    *out = qp->attr;
    return 0;
}

static void forget_entries(struct entries *entries, const struct qp *qp)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < entries->count; i++)
        if (entries->items[i].qp != qp)
            entries->items[kept++] = entries->items[i];
    entries->count = kept;
}

/* Windows of a queue pair end with it. How many there were. */
static int end_windows(struct qp *qp)
{
    int bound = 0;

    for (struct object *o = qp->object.fabric->objects; o; o = o->next) {
        struct mw *mw = (struct mw *)o;

        if (o->kind == KIND_MW && mw->bound && mw->qp == qp) {
            fake_unbind(mw);
            bound++;
        }
    }
    return bound;
}

void fake_end_qp(struct qp *qp)
{
    if (end_windows(qp))
        qp->object.device->counters.destroyed_with_windows++;
    qp->state = QPS_RESET;
    if (!is_rxe(&qp->object)) { /* rxe leaves the completions in the queue */
        forget_entries(&qp->send_cq->ready, qp);
        forget_entries(&qp->recv_cq->ready, qp);
    }
    forget_entries(&qp->send_cq->held, qp);
    forget_entries(&qp->recv_cq->held, qp);
}

/* Events that nobody read go with their queue. */
static void end_cq(struct cq *cq)
{
    uint64_t unread;

    if (cq->channel && cq->pending_events && read(cq->channel->fd, &unread, sizeof unread) == (ssize_t)sizeof unread) {
        unread -= cq->pending_events;
        if (unread && write(cq->channel->fd, &unread, sizeof unread) < 0)
            abort();
    }
}

int fake_destroy(uint64_t address)
{
    struct object *object = (struct object *)(uintptr_t)address;
    enum kind kind;

    fake_lock();
    kind = object ? object->kind : KIND_FREED;
    if (kind == KIND_FREED || kind == KIND_DEVICE)
        return locked_return(-EBADF);
    if (object->children)
        return locked_return(-EBUSY);
    if (kind == KIND_MR && ((struct mr *)object)->windows)
        return locked_return(is_rxe(object) ? -EINVAL : -EBUSY);
    if (kind == KIND_MR)
        object->device->keys[((struct mr *)object)->key >> 8].owner = NULL;
    if (kind == KIND_MW) {
        fake_unbind((struct mw *)object); /* freeing a bound window revokes it at once */
        object->device->keys[((struct mw *)object)->key >> 8].owner = NULL;
    }
    if (kind == KIND_QP)
        fake_end_qp((struct qp *)object);
    if (kind == KIND_CQ)
        end_cq((struct cq *)object);
    if (kind == KIND_CHANNEL)
        close(((struct channel *)object)->fd);
    if (kind == KIND_CONTEXT)
        close(((struct context *)object)->fd);
    else
        fake_forget_events(object);
    unmake(object);
    return locked_return(0);
}

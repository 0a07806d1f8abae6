/* scripted_events.c: the fake's contexts and what they are told besides completions. */
#define _GNU_SOURCE
#include "scripted_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

uint64_t fake_context_new(uint64_t address, int *error)
{
    struct device *device = live(address, KIND_DEVICE);
    struct context *context;
    int fd;

    *error = device ? 0 : -EBADF;
    if (!device)
        return 0;
    fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE);
    if (fd < 0) {
        *error = -errno;
        return 0;
    }
    fake_lock();
    context = fake_make(device->object.fabric, KIND_CONTEXT, sizeof *context);
    context->object.device = device;
    context->object.context = context;
    context->fd = fd;
    device->counters.live_objects++;
    fake_unlock();
    return (uint64_t)(uintptr_t)context;
}

int turn_async_fd(uint64_t address)
{
    struct context *context = live(address, KIND_CONTEXT);

    return context ? context->fd : -EBADF;
}

static void take_one(struct context *context)
{
    uint64_t one;

    if (read(context->fd, &one, sizeof one) < 0)
        abort(); /* the semaphore counts the events */
}

static void tell(struct context *context, const struct fake_event *event)
{
    uint64_t one = 1;

    if (context->count == context->capacity) {
        context->capacity = context->capacity ? 2 * context->capacity : 16;
        context->events = realloc(context->events, context->capacity * sizeof *context->events);
        if (!context->events)
            abort();
    }
    context->events[context->count++] = *event;
    if (write(context->fd, &one, sizeof one) < 0)
        abort();
}

void fake_emit(struct object *about, uint32_t kind)
{
    struct fake_event event = {.kind = kind, .element = (uint64_t)(uintptr_t)about};

    if (about->kind == KIND_QP)
        event.qp_num = ((struct qp *)about)->num;
    tell(about->context, &event);
}

static void emit_to_all(struct device *device, uint32_t kind, uint32_t port)
{
    const struct fake_event event = {.kind = kind, .element = port};

    for (struct object *o = device->object.fabric->objects; o; o = o->next)
        if (o->kind == KIND_CONTEXT && o->device == device)
            tell((struct context *)o, &event);
}

void fake_emit_port(struct device *device, uint32_t kind)
{
    if (!device->quiet)
        emit_to_all(device, kind, 1);
}

/* Events that nobody read go with their object. */
void fake_forget_events(struct object *about)
{
    struct context *context = about->context;
    uint32_t kept = 0;

    for (uint32_t i = 0; i < context->count; i++) {
        if (context->events[i].element == (uint64_t)(uintptr_t)about)
            take_one(context);
        else
            context->events[kept++] = context->events[i];
    }
    context->count = kept;
}

int fake_next_event(uint64_t address, struct fake_event *out)
{
    struct context *context = live(address, KIND_CONTEXT);
    int found;

    if (!context)
        return -EBADF;
    fake_lock();
    found = context->count != 0;
    if (found) {
        *out = context->events[0];
        context->count--;
        memmove(context->events, context->events + 1, context->count * sizeof *context->events);
        take_one(context);
    }
    fake_unlock();
    return found;
}

int fake_raise_event(uint64_t address, uint32_t kind, uint32_t port)
{
    struct object *about = (struct object *)(uintptr_t)address;

    if (!about || about->kind == KIND_FREED)
        return -EBADF;
    fake_lock();
    if (about->kind == KIND_DEVICE)
        emit_to_all((struct device *)about, kind, port);
    else
        fake_emit(about, kind);
    fake_unlock();
    return 0;
}

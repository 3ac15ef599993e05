#define _POSIX_C_SOURCE 200809L

#include "rounds.h"

#include <pthread.h>
#include <stdlib.h>

#include "measure.h"

typedef struct rounds {
  round_work *work;
  void *argument;
  uint32_t num_rounds;
  pthread_barrier_t barrier;
} rounds;

typedef struct worker {
  rounds *all;
  uint32_t thread;
  double *began, *ended; /* of each round */
} worker;

/* No other thread is awake in a round: one that had to be woken would find that most of it is over. */
static void *work(void *argument) {
  const worker *self = argument;
  for (uint32_t round = 0; round < self->all->num_rounds; round++) {
    pthread_barrier_wait(&self->all->barrier);
    self->began[round] = instant_now().wall;
    self->all->work(self->all->argument, self->thread, round);
    self->ended[round] = instant_now().wall;
  }
  return NULL;
}

double shortest_round(uint32_t num_threads, uint32_t num_rounds, round_work *round_work, void *argument) {
  rounds all = {.work = round_work, .argument = argument, .num_rounds = num_rounds};
  pthread_t *threads = calloc(num_threads, sizeof *threads);
  worker *workers = calloc(num_threads, sizeof *workers);
  double *times = calloc((size_t)num_threads * num_rounds, 2 * sizeof *times);
  double shortest = 0;
  if (threads != NULL && workers != NULL && times != NULL &&
      pthread_barrier_init(&all.barrier, NULL, num_threads) == 0) {
    for (uint32_t i = 0; i < num_threads; i++) {
      double *began = times + (size_t)i * 2 * num_rounds;
      workers[i] = (worker){&all, i, began, began + num_rounds};
      if (pthread_create(&threads[i], NULL, work, &workers[i]) != 0) abort();
    }
    for (uint32_t i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&all.barrier);
    for (uint32_t round = 0; round < num_rounds; round++) {
      double began = workers[0].began[round], ended = workers[0].ended[round];
      for (uint32_t i = 1; i < num_threads; i++) {
        if (workers[i].began[round] < began) began = workers[i].began[round];
        if (workers[i].ended[round] > ended) ended = workers[i].ended[round];
      }
      if (round == 0 || ended - began < shortest) shortest = ended - began;
    }
  }
  free(times);
  free(workers);
  free(threads);
  return shortest;
}

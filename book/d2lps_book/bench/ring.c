/* A ring all-reduce's messages, without contents, for SimGrid's SMPI: smpicc ring.c -o ring; smpirun ... ./ring BYTES_OF_A_CHUNK */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
  int rank, ranks, bytes;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  bytes = atoi(argv[1]);
  char *out = SMPI_SHARED_MALLOC(bytes), *in = SMPI_SHARED_MALLOC(bytes);
  for (int step = 0; step < 2 * (ranks - 1); step++)
    MPI_Sendrecv(out, bytes, MPI_BYTE, (rank + 1) % ranks, 0, in, bytes, MPI_BYTE, (rank + ranks - 1) % ranks, 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  if (rank == 0) printf("%.9f\n", MPI_Wtime());
  SMPI_SHARED_FREE(out);
  SMPI_SHARED_FREE(in);
  MPI_Finalize();
  return 0;
}
